"""Regard in programs that others wrote for PyTorch.

`override.py` replaces torch's attention functions (`regard.accelerate`); `torch_functions.py` has
the originals, the open contexts, and the operator of compiled graphs; `torch_calls.py` decides
which calls run here, and recognizes the rule (causal, window, padding, documents) behind a mask
that a model builds as a tensor; `flex_calls.py` does the same for `flex_attention`. `watch.py`,
`observed_call.py` and `module_places.py` let traces and recordings see these calls.
`module_conversions.py` prepares modules for other tools: caches as inputs and outputs for exported
programs, and layers that are found by their exact class.
"""

from regard.integrations.pytorch.module_conversions import WithPast, with_torch_linears
from regard.integrations.pytorch.override import accelerate
from regard.integrations.pytorch.torch_functions import CallCounts

__all__ = ["CallCounts", "WithPast", "accelerate", "with_torch_linears"]
