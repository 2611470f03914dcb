"""task.sh's choice of a network: a directory tree stands for /sys, a script for `ip`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

TASK = Path(__file__).parents[3] / "scripts/slurm/lib/task.sh"
SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
PREFIXES = ("NCCL_", "GLOO_", "TP_", "FI_")  # of what task.sh may set


class Node:
    """A made-up node: its interfaces, its RDMA ports, the interface that leads to the others."""

    def __init__(self, root: Path) -> None:
        self.sys, self.bin = root / "sys", root / "bin"
        for folder in (self.sys / "class/net", self.sys / "class/infiniband", self.bin):
            folder.mkdir(parents=True)
        self.lines: list[str] = []
        self.route = "em4"
        self.interface("lo", address="")

    def interface(
        self, name: str, address: str = "10.0.0.1/24", kind: int = 1, state: str = "up"
    ) -> None:
        """An interface; `kind` is 1 for Ethernet, 32 for InfiniBand; without an address it is not
        usable."""
        folder = self.sys / "class/net" / name
        folder.mkdir()
        (folder / "type").write_text(f"{kind}\n")
        (folder / "operstate").write_text(f"{state}\n")
        if address:
            self.lines.append(f"2: {name}    inet {address} scope global {name}\\       valid_lft")

    def port(
        self,
        device: str,
        layer: str,
        state: str = "4: ACTIVE",
        rate: int = 400,
        net: str = "",
        driver: str = "mlx5_core",
        subnet: str = "fe80:0000:0000:0000",
    ) -> None:
        """An RDMA device with one port, as the kernel shows it; `net` is the interface on top of
        it."""
        folder = self.sys / "class/infiniband" / device
        port = folder / "ports/1"
        (port / "gid_attrs/ndevs").mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
        (folder / "device").mkdir()
        (folder / "device/driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        (port / "gids").mkdir()
        (port / "gids/0").write_text(f"{subnet}:e41d:2d03:0000:0001\n")
        if net and layer == "Ethernet":
            (port / "gid_attrs/ndevs/0").write_text(f"{net}\n")
        elif net:
            (self.sys / "class/net" / net / "device/infiniband" / device).mkdir(parents=True)

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        ip = self.bin / "ip"
        answers = "\n".join(self.lines)
        to_peer = f"10.1.0.2 dev {self.route} src 10.1.0.1" if self.route else ""
        ip.write_text(
            "#!/bin/sh\n"
            f"case $* in *addr*) cat <<'END'\n{answers}\nEND\n;;\n"
            "*10.1.0.1) echo 'local 10.1.0.1 dev lo src 10.1.0.1';;\n"  # this node itself
            f"*) echo '{to_peer}';; esac\n"
        )
        ip.chmod(0o755)
        path = f"{self.bin}:{os.environ['PATH']}"
        clean = {"PATH": path, "KEMPNER_SYS": str(self.sys), "KEMPNER_PEERS": "10.1.0.1 10.1.0.2"}
        return subprocess.run(
            ["bash", str(TASK), "env"],
            env=clean | env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def choice(self, **env: str) -> dict[str, str]:
        """The variables that the task ends up with, and the line that it printed."""
        done = self.run(**env)
        assert done.returncode == 0, done.stderr
        found = dict(line.split("=", 1) for line in done.stdout.splitlines()[1:] if "=" in line)
        chosen = {name: value for name, value in found.items() if name.startswith(PREFIXES)}
        return chosen | {"said": done.stdout.splitlines()[0]}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.interface("em4", "10.1.0.1/24")
    return node


def one(name: str) -> dict[str, str]:
    """All three libraries on one interface, no fabric setting."""
    return dict.fromkeys(SOCKETS, name)


def assert_choice(node: Node, expected: dict[str, str], because: str, **env: str) -> None:
    choice = node.choice(**env)
    assert because in choice.pop("said")
    assert choice == expected


@pytest.mark.parametrize("name", ["ib0", "ibp12s0", "weird7"])
def test_infiniband_by_kind_or_name(node: Node, name: str) -> None:
    node.interface(name, kind=32)
    assert_choice(node, one(name), f"{name} (10.0.0.1): InfiniBand")


@pytest.mark.parametrize(
    "fault", [{"state": "down"}, {"address": ""}, {"state": "lowerlayerdown"}], ids=str
)
def test_infiniband_that_cannot_be_used(node: Node, fault: dict[str, str]) -> None:
    node.interface("ib0", kind=32, **fault)  # type: ignore[arg-type]
    assert_choice(node, one("em4"), "no fast network is up")


def test_the_port_that_is_up_of_two(node: Node) -> None:
    node.interface("ib0", kind=32, state="down")
    node.interface("ib1", kind=32)
    assert_choice(node, one("ib1"), "InfiniBand")


def test_virtual_interface_with_a_suffix(node: Node) -> None:
    node.interface("ib0", address="")
    node.lines.append("3: ib0@if8    inet 10.0.0.9/24 scope global ib0")
    assert_choice(node, one("ib0"), "ib0 (10.0.0.9)")


def test_a_name_that_is_a_prefix_is_exact_for_nccl(node: Node) -> None:
    node.interface("ib1", kind=32)
    node.interface("ib10", kind=32, address="")
    assert_choice(node, {**one("ib1"), "NCCL_SOCKET_IFNAME": "=ib1"}, "InfiniBand")


def test_roce_takes_the_fastest_active_port(node: Node) -> None:
    node.interface("eth0", "10.2.0.1/24")
    node.interface("eth1", "10.3.0.1/24")
    node.interface("eth2", "10.4.0.1/24")
    node.port("mlx5_0", "Ethernet", rate=25, net="eth0")
    node.port("mlx5_1", "Ethernet", rate=400, net="eth1")
    node.port("mlx5_2", "Ethernet", rate=800, net="eth2", state="1: DOWN")
    assert_choice(node, one("eth1"), "RoCE, mlx5_1:1 is active")


def test_roce_without_an_address_is_not_taken(node: Node) -> None:
    node.interface("eth1", address="")
    node.port("mlx5_1", "Ethernet", net="eth1")
    assert_choice(node, one("em4"), "no fast network is up")


def test_infiniband_beside_ethernet_ports(node: Node) -> None:
    """NCCL is kept off the Ethernet ports, by exact names: mlx5_1 is not mlx5_10."""
    node.interface("ib0", kind=32)
    node.port("mlx5_1", "InfiniBand")
    node.port("mlx5_10", "Ethernet", net="em4")
    hca = {"NCCL_IB_HCA": "=mlx5_1:1"}
    assert_choice(node, one("ib0") | hca, "InfiniBand, up, NCCL_IB_HCA==mlx5_1:1 keeps NCCL")
    assert_choice(node, one("ib0") | {"NCCL_IB_HCA": "mine"}, "InfiniBand", NCCL_IB_HCA="mine")


def test_four_adapters_of_which_one_has_an_address(node: Node) -> None:
    """NCCL takes all four by itself; sockets take the one."""
    for k in range(4):
        node.interface(f"ib{k}", kind=32, address="10.5.0.1/24" if k == 2 else "")
        node.port(f"mlx5_{k}", "InfiniBand", net=f"ib{k}")
    assert_choice(node, one("ib2"), "ib2 (10.5.0.1): InfiniBand, up; passed over: em4, ib0 (no")


@pytest.mark.parametrize("small", ["fe80:0000:0000:0001", "fe80:0000:0000:0000"])
def test_adapters_on_two_fabrics(node: Node, small: str) -> None:
    """Ports with different subnet prefixes do not reach each other: the larger group is taken."""
    large = {"fe80:0000:0000:0000", "fe80:0000:0000:0001"}.difference({small}).pop()
    node.interface("ib0", "10.5.0.1/24", kind=32)
    node.interface("ib1", "10.6.0.1/24", kind=32)
    node.port("mlx5_0", "InfiniBand", net="ib0", subnet=small)
    node.port("mlx5_1", "InfiniBand", net="ib1", subnet=large)
    node.port("mlx5_2", "InfiniBand", subnet=large)
    hca = {"NCCL_IB_HCA": "=mlx5_1:1,mlx5_2:1"}
    assert_choice(node, one("ib1") | hca, "ib1 (10.6.0.1): InfiniBand")


def test_roce_on_a_bond(node: Node) -> None:
    """The port belongs to a part of the bond, the address to the bond."""
    node.interface("eth1", address="")
    node.interface("bond0", "10.7.0.1/24")
    (node.sys / "class/net/eth1/master").symlink_to("../bond0")
    node.port("mlx5_bond_0", "Ethernet", net="eth1")
    assert_choice(node, one("bond0"), "bond0 (10.7.0.1): RoCE, mlx5_bond_0:1 is active")


def test_virtual_bridges_are_never_taken(node: Node) -> None:
    node.interface("docker0", "172.17.0.1/16")
    node.interface("virbr0", "192.168.122.1/24")
    assert_choice(
        node, one("em4"), "this one leads to the other nodes; passed over: docker0, virbr0"
    )


def test_ipv6_only(node: Node) -> None:
    node.lines.clear()
    node.interface("ib0", kind=32, address="")
    node.lines.append("4: ib0    inet6 fd00:5::1/64 scope global \\       valid_lft forever")
    assert_choice(node, one("ib0"), "ib0 (fd00:5::1): InfiniBand")


@pytest.mark.parametrize("device", ["efa_0", "rdmap16s27"])
def test_efa_takes_the_route(node: Node, device: str) -> None:
    node.interface("hsn0")
    node.port(device, "Unspecified", driver="efa")
    libfabric = {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}
    assert_choice(node, one("em4") | libfabric, "EFA is available")
    assert_choice(
        node,
        one("em4") | libfabric | {"FI_PROVIDER": "mine"},
        "EFA is available",
        FI_PROVIDER="mine",
    )


def test_slingshot(node: Node) -> None:
    for k in range(4):
        node.interface(f"hsn{k}", f"10.8.{k}.1/24")
    libfabric = {
        "FI_CXI_DISABLE_HOST_REGISTER": "1",
        "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_MR_CACHE_MONITOR": "userfaultfd",
        "NCCL_CROSS_NIC": "1",
    }
    sockets = one("hsn0") | {"NCCL_SOCKET_IFNAME": "hsn"}  # a prefix: all four
    assert_choice(node, sockets | libfabric, "hsn0 (10.8.0.1): Slingshot")


def test_without_iproute2(node: Node, tmp_path: Path) -> None:
    """In a container: who has a route of its own has an address, and /proc knows the way."""
    node.interface("eth7", address="")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "awk", "sed", "sort", "uname", "readlink", "paste"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    row = "{}\t{}\t00000000\t0001\t0\t0\t0\t{}\t0\t0\t0\n"
    (net / "route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        + row.format("em4", "00000000", "00000000")
        + row.format("eth7", "0000010A", "0000FFFF")  # 10.1.0.0/16
        + row.format("em4", "0000000A", "000000FF")  # 10.0.0.0/8
    )
    (net / "if_inet6").write_text("fe80 02 40 20 80 em4\n")
    env = {"PATH": str(tools), "KEMPNER_PROC": str(net.parent)}
    assert_choice(node, one("eth7"), "this one leads to the other nodes", **env)
    node.interface("ib0", kind=32, address="")
    (net / "if_inet6").write_text("fd000005000000000000000000000001 04 40 00 80 ib0\n")
    assert_choice(node, one("ib0"), "InfiniBand, up", **env)


def test_nothing_leads_anywhere(node: Node) -> None:
    node.route = ""
    assert_choice(node, {}, "left to NCCL and gloo")


@pytest.mark.parametrize(
    ("given", "others"),
    [
        ("em4", "em4"),
        ("=em4", "em4"),
        ("em", "em4"),
        ("eth9,em4", "em4"),  # of a list that a site's module sets one is enough
        ("hsn,em,bond", "em4"),
        ("eth9,bond", None),
        ("=em", None),
        ("^lo,docker", "ib0"),  # names none: what is not excluded is chosen from
        ("^docker0,ib", "em4"),
        ("^=ib", "ib0"),
        ("^=lo,ib0", "em4"),
        ("^ib,em", ""),
    ],
)
def test_the_users_value_stays(node: Node, given: str, others: str | None) -> None:
    """NCCL's grammar: prefixes, "=" for exact names, "^" for all but these."""
    node.interface("ib0", kind=32)
    if others is None:
        done = node.run(NCCL_SOCKET_IFNAME=given)
        assert done.returncode == 2
        assert f"NCCL_SOCKET_IFNAME={given}" in done.stderr and "em4 ib0 lo" in done.stderr
        return
    expected = {**(one(others) if others else {}), "NCCL_SOCKET_IFNAME": given}
    assert_choice(node, expected, f"NCCL_SOCKET_IFNAME={given} is given", NCCL_SOCKET_IFNAME=given)


def test_gloo_takes_whole_names(node: Node) -> None:
    done = node.run(GLOO_SOCKET_IFNAME="em")
    assert done.returncode == 2 and "has no interface 'em'; it has em4 lo" in done.stderr
    done = node.run(GLOO_SOCKET_IFNAME="em4,em5")  # it makes a device of each
    assert done.returncode == 2 and "has no interface 'em5'" in done.stderr


def test_only_the_first_task_of_a_node_says_it(node: Node) -> None:
    assert "kempner: network" in node.run(SLURM_LOCALID="0").stdout
    assert "kempner: network" not in node.run(SLURM_LOCALID="1").stdout


def test_the_command_starts_with_the_signals_ignored(tmp_path: Path) -> None:
    """A request before Python is ready does not end the task; its arguments are untouched."""
    words = ["a b", "$HOME", "*", "", '"', "[0.9, 0.95]"]
    code = "import signal as s, sys; print(sys.argv[1:], *map(s.getsignal, (15, 2, 10, 12)))"
    command = ["bash", str(TASK), "python3", "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines()[-1] == f"{words} 1 1 1 1"  # SIG_IGN
