"""Without a CUDA device Triton's interpreter stands in; it must be asked for before any import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from torch.fx.experimental import proxy_tensor

    noted = proxy_tensor.extract_val

    # A trace of tensors makes a fake twin of each for the compiler, which only a CUDA device has.
    # That is half of the time of a trace.
    def little_noted(value, *more, **settings):
        return None if type(value) is torch.Tensor else noted(value, *more, **settings)

    proxy_tensor.extract_val = little_noted
