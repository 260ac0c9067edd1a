"""What a process has imported before it forks, for the tests."""
# ruff: noqa: E402, F401

import contextlib
import gc
import inspect
import sys

gc.disable()

import datasets
import harness
import hypothesis.strategies
import matplotlib.backends.backend_agg
import matplotlib.figure
import peft
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
import torch.distributed.run
import transformers.models.gpt2.modeling_gpt2
import transformers.models.qwen2.modeling_qwen2

with contextlib.suppress(ImportError):
    import reasoning_gym
    import wandb

inspect.getmodule(sys._getframe())  # asks all modules for their files, once for all forks
rendezvous.get_method_name = lambda: ""  # asks them again for each message, for a log
gc.freeze()  # no fork looks through them for garbage, which would copy their pages
gc.enable()
