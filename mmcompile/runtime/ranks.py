"""Hides who this process is among its ranks: by torch.distributed, or by what torchrun, srun or mpirun tell a process."""

from __future__ import annotations

import os
import sys

from torch import distributed

from mmcompile.runtime.selection import whole

__all__ = ["MOST", "ranks", "ranks_of_indices"]

#: Batch sizes and ranks are below this: a step's positions fit into 64 bits.
MOST = 1 << 31
#: What mpirun says of a process: Open MPI's, and that of MPICH and Intel MPI.
_MPI = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_REMEDY = "call torch.distributed.init_process_group before the first batch, or pass rank= and world_size= (0 and 1 for a process on its own)"


def ranks(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """(rank, world size) of this process: as given, else of `torch.distributed`, else of torchrun, srun or mpirun, by their variables, else (0, 1).

    Raises ValueError where only one is given or they don't fit.  Raises RuntimeError where variables say that there are more processes but not which
    one this is: ignored, they would train every rank on the same data.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size are given together or not at all, not rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None:
        size = whole("world_size", world_size, 1, MOST)
        return whole("rank", rank, 0, size), size
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    torchrun = _said("RANK", "WORLD_SIZE")
    if torchrun is not None and torchrun[1] > 1:
        return torchrun
    slurm = _said("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") if os.environ.get("SLURM_STEP_NUM_TASKS") else None
    if slurm is not None and slurm[1] > 1:
        if torchrun is not None:
            raise RuntimeError(f"WORLD_SIZE=1 says that this process is alone, SLURM_STEP_NUM_TASKS={slurm[1]} that it is not; {_REMEDY}")
        return slurm
    mpi = next(filter(None, (_said(rank, size) for rank, size in _MPI)), None)
    if mpi is not None and mpi[1] > 1:
        return mpi
    if torchrun is None and slurm is None:
        # A batch script's own commands see the tasks that the job may start and SLURM_PROCID=0: one process alone, or one of many started otherwise.
        texts = {name: os.environ.get(name, "") for name in ("SLURM_PROCID", "SLURM_NTASKS")}
        if texts["SLURM_PROCID"] not in ("", "0") or texts["SLURM_NTASKS"] not in ("", "1"):
            raise RuntimeError(f"several processes may run here, but SLURM_STEP_NUM_TASKS of srun is not set ({_listed(texts)}); {_REMEDY}")
    return 0, 1


def ranks_of_indices(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """`ranks`, for indices that a DataLoader takes.

    Raises RuntimeError in one of several processes of Accelerate's that was not said: its `prepare` makes of a DataLoader one that divides whatever
    indices there are, so that each rank would read a part of its part, and nothing tells whether a DataLoader was prepared.
    """
    found = ranks(rank, world_size)
    accelerate = sys.modules.get("accelerate.state")
    if rank is None and found[1] > 1 and accelerate is not None and accelerate.is_initialized():
        raise RuntimeError(
            f"Accelerate runs {found[1]} processes, and its prepare() divides the indices of a DataLoader among them, which ShardSampler does too: "
            "use ShardLoader, which prepare() leaves as it is, or say to ShardSampler who divides: rank=0, world_size=1 where the DataLoader is "
            "prepared, rank=accelerator.process_index, world_size=accelerator.num_processes where it is not"
        )
    return found


def _said(rank_name: str, size_name: str) -> tuple[int, int] | None:
    """What two variables say, None where they say nothing of other processes."""
    texts = {name: os.environ.get(name, "") for name in (rank_name, size_name)}
    rank, size = (_number(text) for text in texts.values())
    if size is None and rank in (None, 0):
        return None
    if rank is None and size == 1:
        return 0, 1
    if rank is None or size is None or not 0 <= rank < size:
        raise RuntimeError(f"the environment speaks of several processes, but not which one of how many this is ({_listed(texts)}); {_REMEDY}")
    return rank, size


def _listed(texts: dict[str, str]) -> str:
    return ", ".join(f"{name}={text}" if text else f"{name} not set" for name, text in texts.items())


def _number(text: str) -> int | None:
    """A number in a variable, -1 for what is none, None where it is not set."""
    if not text:
        return None
    return int(text) if text.isascii() and text.isdigit() else -1
