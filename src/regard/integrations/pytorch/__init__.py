"""Any PyTorch model, one line: `regard.accelerate` runs torch's attention functions through
`attend`.

`override.py` replaces torch's functions and decides which calls leave torch; `dense_masks.py` reads
the masks that models build as tensors.
"""

from regard.integrations.pytorch.override import Calls, accelerate

__all__ = ["Calls", "accelerate"]
