"""Lines as NCCL 2.4 to 2.28 and aws-ofi-nccl write them, with the host names changed."""

from __future__ import annotations

import pytest

from kempner.jobs.ranks.nccl_transport import chosen_by_user, expected_transports, transport_of

INFINIBAND = """\
n1:179:179 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:179:179 [0] NCCL INFO Using network IB
"""
ROCE = """\
n1:38610:38610 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB ens0f0:198.18.2.2<0>
n1:38610:38610 [0] NCCL INFO Using network IB
"""
FELL_BACK = """\
n1:152:386 [0] NCCL INFO NET/IB : No device found.
n1:152:386 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
n1:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
n1:152:386 [0] NCCL INFO Initialized NET plugin Socket
n1:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
n1:152:386 [0] NCCL INFO Using network Socket
n1:152:386 [0] NCCL INFO comm 0x55f90cbfd740 rank 0 nranks 1 cudaDev 0 nvmlDev 0 - Init START
"""
EFA = """\
n1:6831:6840 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
n1:6831:6840 [0] NCCL INFO Using network Libfabric
"""
EFA_BROKEN = """\
n1:79:79 [0] get_ofi_provider:312 NCCL WARN NET/OFI Could not find any optimal provider
n1:79:79 [0] NCCL INFO NET/IB : No device found.
n1:79:79 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.8.153<0>
n1:79:79 [0] NCCL INFO Using network Socket
"""
CHANNEL = "n1:1:2 [7] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/{}\n"


@pytest.mark.parametrize(
    ("text", "transport"),
    [
        (INFINIBAND, "IB"),
        (ROCE, "IB"),
        (FELL_BACK, "Socket"),
        (EFA, "OFI"),
        (EFA_BROKEN, "Socket"),
        ("n1:1:2 [0] NCCL INFO Using network AWS Libfabric\n", "OFI"),
        ("n1:1:2 [0] NCCL INFO Using network IBext_v8\n", "IB"),
        ("n1:1:2 [0] NCCL INFO Assigned NET plugin FasTrak to comm\n", "FasTrak"),
        (CHANNEL.format("IB/0/GDRDMA"), "IB"),
        (CHANNEL.format("AWS Libfabric/0"), "OFI"),
        (INFINIBAND + CHANNEL.format("Socket/0"), "Socket"),  # what is used counts
        ("n1:1:2 [0] NCCL INFO NET/IB : No device found.\n", ""),
        ("n1:1:2 [0] NCCL INFO Channel 00/02 : 1[1] -> 0[0] via P2P/CUMEM\n", ""),
        ("", ""),
    ],
)
def test_transport_of(text: str, transport: str) -> None:
    assert transport_of(text) == transport


def test_what_each_network_should_use() -> None:
    assert transport_of(INFINIBAND) in expected_transports(
        "InfiniBand"
    ) and "IB" in expected_transports("RoCE")
    assert expected_transports("EFA") == expected_transports("Slingshot") == ("OFI",)
    assert "Socket" not in (*expected_transports("InfiniBand"), *expected_transports("EFA"))
    for network in ("Ethernet", "given", ""):
        assert expected_transports(network) == ()


def test_a_choice_of_the_user() -> None:
    assert chosen_by_user({"NCCL_NET": "Socket"}) == "NCCL_NET=Socket"
    assert chosen_by_user({"NCCL_IB_DISABLE": "1"}) == "NCCL_IB_DISABLE=1"
    assert chosen_by_user({"NCCL_IB_DISABLE": "0"}) == chosen_by_user({}) == ""
