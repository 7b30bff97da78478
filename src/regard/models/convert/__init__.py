"""One checkpoint into another: other heads, latents, another rotary layout, a longer context,
another dtype.
"""

from regard.models.convert.context import to_context
from regard.models.convert.dtype import to_dtype
from regard.models.convert.heads import to_groups
from regard.models.convert.latent import to_latent
from regard.models.convert.layer import Checkpoint, Step
from regard.models.convert.layout import to_layout
from regard.models.convert.report import Healing, Measured, Report, measure
from regard.models.convert.run import Wanted, convert

__all__ = [
    "Checkpoint",
    "Healing",
    "Measured",
    "Report",
    "Step",
    "Wanted",
    "convert",
    "measure",
    "to_context",
    "to_dtype",
    "to_groups",
    "to_latent",
    "to_layout",
]
