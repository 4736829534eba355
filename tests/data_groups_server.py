"""Imported by the server that data_groups.py forks ranks from: what every rank would have to import and compile."""

import data_groups  # noqa: F401
import torch.distributed.pipelining  # noqa: F401

from thinpipe.harness.compression.kernels import cpu

cpu.warm_up()
