"""Latency and throughput of a server, with one client and with many at once.

    python benchmarks/serve.py --model en-de --input dev.en --clients 1 100

The server is another process. Each client sends one line after the other and waits for
each translation. `p95_ms` is the latency that 95% of the requests do not exceed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import report

from minitransformer.text.lines import read_lines

SCRIPT = Path(__file__).parents[1] / "translate.py"


def ask(address: str, line: str) -> float:
    """Return the seconds until a line is translated."""
    body = json.dumps({"q": line, "source": "auto", "target": "auto"}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}translate", body, headers)
    started = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        json.load(answer)
    return time.perf_counter() - started


def measure(
    address: str, lines: list[str], clients: int, seconds: float
) -> dict[str, float]:
    """Let clients ask for some seconds."""
    repeated = itertools.cycle(lines)
    started = time.perf_counter()

    def client(_: int) -> list[float]:
        latencies = []
        while time.perf_counter() - started < seconds:
            latencies.append(ask(address, next(repeated)))
        return latencies

    # All clients at once; the latencies of all of them together.
    with ThreadPoolExecutor(clients) as threads:
        by_client = threads.map(client, range(clients))
        latencies = list(itertools.chain.from_iterable(by_client))
    elapsed = time.perf_counter() - started
    median, p95 = np.percentile(latencies, [50, 95]) * 1000
    return {
        "median_ms": round(median, 1),
        "p95_ms": round(p95, 1),
        "lines_a_second": round(len(latencies) / elapsed, 1),
    }


@contextmanager
def serving(model: str, port: int, line: str) -> Iterator[str]:
    """Start a server, have it translate a line, and yield its address; then end it."""
    flags = ["--model", model, "--serve", str(port)]
    command = [sys.executable, str(SCRIPT), *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        said = [""]
        while said and "open" not in said:  # it may say more before
            said = server.stderr.readline().split()
        if not said:
            sys.exit("the server ended")
        address = said[said.index("open") + 1]
        ask(address, line)
        yield address
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="en-de")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    lines = [line for line in read_lines(args.input) if line.strip()]
    with serving(args.model, args.port, lines[0]) as address:
        clients = {n: measure(address, lines, n, args.seconds) for n in args.clients}
    report("serve", model=args.model, clients=clients)


if __name__ == "__main__":
    main()
