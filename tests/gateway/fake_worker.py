"""A process that speaks the supervisor's channel and does nothing else: started in milliseconds, played by a word.

    serve       says that it serves, answers, drains and hurries as asked; on drain it stays for `linger_s` of the word
                serve:SECONDS
    refuse      ends with code 2 before it serves
    short       serves and ends with code 1 at once
    stubborn    serves and hears nothing
    garbled     serves and then says what is no report
    slow        is as long in starting as a test lasts

It uses the standard library alone, and its words are those of JSON, so that it checks the channel's form from outside.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

PUSH_S = 0.1


def main() -> int:
    word, _, linger = sys.argv[1].partition(":")
    end = socket.socket(fileno=0)
    lines = end.makefile("rb", buffering=0)  # what a buffer holds, select does not see
    start = json.loads(lines.readline())
    if word == "refuse":
        return 2
    if word == "slow":
        time.sleep(60)
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    report = {"up": True, "session": [f"s{os.getpid()}", 1], "in_flight": 1, "connections": int(start["place"])}

    def say(**more: object) -> None:
        end.sendall(json.dumps({**report, **more, "from a newer version": 1}).encode() + b"\n")

    say(counts={"headrace_sheds_total": [[["bulk", "queue_full"], 1]]})
    if word == "short":
        return 1
    if word == "garbled":
        end.sendall(b'{"up": "perhaps"}\n')
    if word in {"stubborn", "garbled"}:
        while True:
            time.sleep(60)
    while True:
        ready, _, _ = select.select([end, wake], [], [], PUSH_S)
        if not ready:
            say()
            continue
        order = {"do": "drain"}
        if end in ready:
            line = lines.readline()
            if not line:
                return 3
            order = json.loads(line)
        if order["do"] == "tell":
            say(
                answers=order["seq"],
                gauges={"headrace_client_connections": [[[], 2]]},
                status={"settings": start["settings"]},
            )
        elif order["do"] in {"drain", "retire"}:
            say(leaving=True)
            select.select([end], [], [], float(linger or 0))
            return 0
        else:
            return 1


if __name__ == "__main__":
    sys.exit(main())
