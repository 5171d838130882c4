"""A ray cluster with two workers: `python -m tests.compiler.ray_cluster` prints its address, and ends it when its standard input does."""

from __future__ import annotations

import sys

import ray


def main() -> None:
    made = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=100 << 20)
    print(made.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
