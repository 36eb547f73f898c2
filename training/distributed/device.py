"""The device that a training process computes on; everything else follows its process group."""

import os
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from etl.errors import UserError

DeviceName = Literal["auto", "cpu", "cuda"]
CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by device; counts stay on the CPU


def resolve_device(name: DeviceName) -> torch.device:
    """The device of this process; "auto" is CUDA where it can be used.

    With several processes each takes the card of its LOCAL_RANK. Raises UserError if CUDA is
    requested and cannot be used.
    """
    reason = None if name == "cpu" else missing_cuda()
    if name == "cuda" and reason:
        raise UserError(f"--device cuda: {reason}; use --device cpu")
    if name == "cpu" or reason:
        return CPU
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def missing_cuda() -> str | None:
    """Why tables and collectives cannot run on CUDA here; None if they can."""
    import fbgemm_gpu

    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if fbgemm_gpu.__variant__ != "cuda":
        return "fbgemm_gpu is installed without CUDA kernels (see requirements/gpu.txt)"
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        return f"there are more processes than the {torch.cuda.device_count()} cards of the machine"
    return None


def process_device() -> torch.device:
    """The device of the default process group."""
    if "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this process in a mesh."""
    if mesh.device_type == "cpu":
        return CPU
    return torch.device(mesh.device_type, torch.cuda.current_device())
