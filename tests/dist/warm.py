"""Imported by the process that ranks are forked from: what each of them would do first is done once, there."""

import gc

import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import meshrunner.recipes.pretrain  # noqa: F401
from tests.composed import experiment

experiment()
gc.collect()
gc.freeze()  # a rank's collections leave out what it was born with
