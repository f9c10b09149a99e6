"""Without a CUDA device Triton's interpreter stands in; it must be asked for before any import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from torch.fx.experimental import proxy_tensor

    # A trace notes a fake twin of every value for the compiler, which only a CUDA device has.
    # They are half of the time that a trace takes.
    proxy_tensor.extract_val = lambda *_, **__: None
