"""The catalogue of named mechanisms: constructors that assemble parts, and `VARIANTS`, which tells what there is."""

from regard.nn.variants.registry import VARIANTS, Variant, build
from regard.nn.variants.softmax import gqa, mqa

__all__ = ["VARIANTS", "Variant", "build", "gqa", "mqa"]
