"""Regard in programs that others wrote for PyTorch.

`override.py` replaces torch's attention functions (`regard.accelerate`), and `graph_operator.py`
does so in compiled graphs; `torch_functions.py` has the originals and
the open contexts; `torch_calls.py` decides which calls run here, and `dense_masks.py`
recognizes the rule (causal, window, padding, documents) behind a mask that a model builds as a
tensor; `flex_calls.py` does the same for `flex_attention`. `watch.py`, `observed_call.py` and
`module_places.py` let traces and recordings see these calls. `past.py` makes the cached tensors of
a layer or a decoder its inputs and outputs, for exported programs; `torch_linears.py` prepares a
model for tools that find layers by their exact class.
"""

from regard.integrations.pytorch.override import accelerate
from regard.integrations.pytorch.past import WithPast
from regard.integrations.pytorch.torch_functions import CallCounts
from regard.integrations.pytorch.torch_linears import with_torch_linears

__all__ = ["CallCounts", "WithPast", "accelerate", "with_torch_linears"]
