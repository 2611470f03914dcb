"""Exchanges of lowcomm.mode = steps run behind the steps, without a membership of several
processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kempner.extensions.lowcomm import beat
from kempner.extensions.lowcomm.membership import Epoch, TooFew
from kempner.extensions.lowcomm.steps import StepsExchange, _Started
from tests.waiting import LIMIT_S, until


class Alone:
    """Of the membership and of the group of an epoch: one replica, whose exchanges are counted."""

    size = 1

    def __init__(self, most: int) -> None:
        self.epochs, self.most = 0, most

    def round(self, rounds: int, exchange: Callable[[Any], Any]) -> tuple[Epoch, Any]:
        self.epochs += 1
        if self.epochs > self.most:
            raise TooFew("0 replicas are left, 1 are needed")
        epoch = Epoch(self.epochs, rounds, ("0.1",), (), False, {}, ())
        return epoch, exchange(self)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def start(most: int, count: int) -> tuple[StepsExchange, list[_Started]]:
    exchange: Any = StepsExchange(Alone(most), nullcontext)  # type: ignore[arg-type]
    return exchange, [exchange.start(torch.full((3,), float(i)), "") for i in range(count)]


def test_an_exchange_is_done_before_its_result_is_asked_for() -> None:
    exchange, started = start(2, 2)
    until(lambda: all(each.done.done() for each in started))
    # In the order of their start, whatever is asked for first.
    assert started[1].wait().tolist() == [1.0] * 3 and exchange.last.number == 2
    assert started[0].wait().tolist() == [0.0] * 3 and exchange.last.number == 1


def test_too_few_replicas_end_every_exchange_that_follows() -> None:
    _, started = start(1, 3)
    assert started[0].wait().tolist() == [0.0] * 3
    for each in started[1:]:
        with pytest.raises(TooFew):
            each.wait()


def test_a_heartbeat_does_not_cut_a_long_line() -> None:
    """A report of many replicas reaches the heartbeat in pieces, with more than a beat between."""
    judge, ours = socket.socketpair()
    words = [sys.executable, "-S", "-I", beat.__file__, str(ours.fileno()), str(os.getpid())]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=(ours.fileno(),), bufsize=0)
    ours.close()
    assert process.stdin is not None
    process.stdin.write(b"{" * 5000)
    time.sleep(2 * beat.REPLICA_HEARTBEAT_S)
    process.stdin.write(b"}\n")
    process.stdin.close()
    lines = judge.makefile("rb").read().splitlines()
    assert b"{" * 5000 + b"}" in lines and process.wait(LIMIT_S) == 0
