"""Write and read the records of a run for the batch scripts: one JSON object a line, or a file.

    records.py append FILE NAME=VALUE...            a line more, with the time; synced
    records.py write FILE NAME=VALUE...             a file of one object, with the time
    records.py values FILE NAME...                  these values of a file of one object
    records.py find FILE NAME=VALUE... -- NAME...   these values of each line that has those values

A VALUE is text; NAME:=VALUE is JSON. In `find`, a VALUE may be several with commas between, or *,
which is any but none. Answers end with a NUL each, behind the word that kp_values of container.sh
looks for; what is missing is empty. Exit code 3: the file cannot be read or written.

Any Python from 3.6 on runs this, without a package: it starts in 20 ms where `python -I -S` does.
"""

import json
import os
import sys
import time


def parse(words):
    """Map NAME=VALUE and NAME:=JSON to an object."""
    record = {}
    for word in words:
        name, value = word.split("=", 1)
        if name.endswith(":"):
            record[name[:-1]] = json.loads(value)
        else:
            record[name] = "".join(c if c.isprintable() else " " for c in value)
    return record


def append(path, *words):
    line = json.dumps(dict(parse(words), time=int(time.time()))) + "\n"
    with open(path, "ab+") as file:
        # A rank that was killed may have left half a line: it must not swallow this one.
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def write(path, *words):
    # A reader sees the old record or the new one, and a full disk leaves the old one.
    unfinished = f"{path}.{os.getpid()}"
    try:
        with open(unfinished, "w") as file:
            json.dump(dict(parse(words), time=int(time.time())), file)
            file.write("\n")
        os.replace(unfinished, path)
    except OSError:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def values(path, *names):
    with open(path, "rb") as file:
        answer(load(file.read()), names)


def find(path, *words):
    """Print the values of the lines that match; a line that is torn, or no object, matches none."""
    end = words.index("--")
    conditions = [word.split("=", 1) for word in words[:end]]
    with open(path, "rb") as file:
        for record in map(load, file):
            if all(is_one_of(text(record.get(name)), value) for name, value in conditions):
                answer(record, words[end + 1 :])


def load(line):
    try:
        record = json.loads(line.decode())
    except ValueError:
        record = {}
    return record if isinstance(record, dict) else {}


def text(value):
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def is_one_of(value, choices):
    return bool(value) if choices == "*" else value in choices.split(",")


def answer(record, names):
    for name in names:
        sys.stdout.buffer.write(text(record.get(name)).encode("utf-8", "replace") + b"\0")


def main(command, path, *words):
    if command in ("values", "find"):
        sys.stdout.write("kempner-answer\0")
        # answer() writes to the buffer below, past what is still in this one.
        sys.stdout.flush()
    {"append": append, "write": write, "values": values, "find": find}[command](path, *words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError:
        sys.exit(3)
