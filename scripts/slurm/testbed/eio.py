"""A directory in which every call fails with EIO, as on a file server that is lost.

    python3 eio.py DIRECTORY

Mounts a file system in user space over it (linux/fuse.h) and answers every request with that error.
"""

import ctypes
import errno
import os
import struct
import sys

# Operation codes of linux/fuse.h, and flags of mount(2).
INIT, FORGET, BATCH_FORGET, INTERRUPT = 26, 2, 42, 36
NOSUID_NODEV = 2 | 4


def main() -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"eio", sys.argv[1].encode(), b"fuse", NOSUID_NODEV, options):
        raise OSError(ctypes.get_errno(), f"mount {sys.argv[1]}")
    while True:
        request = os.read(device, 1 << 20)
        # struct fuse_in_header: length, operation, and the number that the answer has to bear.
        _, code, unique = struct.unpack_from("=IIQ", request)
        if code in (FORGET, BATCH_FORGET, INTERRUPT):  # nobody waits for an answer
            continue
        if code == INIT:
            # struct fuse_init_out of protocol 7.31, without options, behind a fuse_out_header.
            body = struct.pack("=IIIIHHIIHH32x", 7, 31, 0, 0, 12, 9, 1 << 16, 1, 0, 0)
            os.write(device, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)
        else:
            os.write(device, struct.pack("=IiQ", 16, -errno.EIO, unique))


if __name__ == "__main__":
    main()
