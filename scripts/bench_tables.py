"""How fast a Parquet table becomes a dataset, against `pyarrow.parquet.read_table` and `np.save`, and how much memory that takes.

python scripts/bench_tables.py [--rows 10000000] [--columns 8] [--rounds 5] [--workers 2] [--folder DIR]

Both are commands of their own, from start to end, in turns.  The table is random float32, in row groups of 2^20 rows as pyarrow writes them, and in
memory from the round before.  `np.save` syncs nothing and hashes nothing; the build hashes and syncs what it writes.  On a busy machine the ratio of
CPU times says more than that of wall times.  Not shown: other compressions, texts, tables that have to be sorted, a slow disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench_common import machine

_PLAIN = (
    "import sys, numpy as np, pyarrow.parquet as pq; table = pq.read_table(sys.argv[1]); "
    "np.save(sys.argv[2], np.column_stack([column.to_numpy() for column in table.columns]))"
)


#: Seconds between two looks at the processes of a command.
_LOOK_S = 0.02


def make(path: Path, rows: int, columns: int) -> None:
    """Write the table, a row group at a time."""
    rng, names = np.random.default_rng(0), [f"c{i}" for i in range(columns)]
    with pq.ParquetWriter(path, pa.schema([(name, pa.float32()) for name in names])) as writer:
        for start in range(0, rows, 1 << 20):
            n = min(1 << 20, rows - start)
            writer.write_table(pa.table({name: rng.standard_normal(n, dtype=np.float32) for name in names}), row_group_size=1 << 20)


def timed(command: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU seconds of all its processes, MiB that these held at most, pages that they share counted once for each) of a command."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    cpu: dict[int, float] = {}
    most = 0
    while process.poll() is None:
        held = 0
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == process.pid:  # of the session that began with the command
                cpu[int(name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                held += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        most = max(most, held)
        time.sleep(_LOOK_S)
    took = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return took, sum(cpu.values()), most / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where files are written; default: the folder for temporary ones")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-tables-", dir=given.folder))
    try:
        table, out = folder / "table.parquet", folder / "out"
        make(table, given.rows, given.columns)
        print(machine())
        print(f"{given.rows:,} rows of {given.columns} float32, {table.stat().st_size / 2**20:,.0f} MiB as Parquet; {given.rounds} rounds\n")
        commands = {
            "read_table + np.save": [sys.executable, "-c", _PLAIN, str(table), str(folder / "x.npy")],
            "mmcompile build": [sys.executable, "-m", "mmcompile", "build", str(table), str(out), "--workers", str(given.workers)],
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        for _ in range(given.rounds):
            for name, command in commands.items():
                shutil.rmtree(out, ignore_errors=True)
                found[name].append(timed(command))
        medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
        for name, (took, cpu, mib) in medians.items():
            print(f"{name:22} {given.rows / took:12,.0f} rows/s   {took:6.2f} s, {cpu:6.2f} s of CPU, {mib:,.0f} MiB at most in all processes")
        pairs = list(zip(*found.values(), strict=True))
        wall, cpu = (statistics.median(plain[i] / built[i] for plain, built in pairs) for i in (0, 1))
        print(f"\nrate of the build: {wall:.2f} of the plain one (at least 0.5), by CPU time {cpu:.2f}; medians of pairs")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
