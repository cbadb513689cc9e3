"""Imports for the process that ranks are forked from, so that each is done once."""

import gc

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import meshrunner.recipes.pretrain  # noqa: F401
from tests.composed import experiment

experiment()
gc.collect()
gc.freeze()  # a rank's collections leave out what it was born with
