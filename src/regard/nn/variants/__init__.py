"""The catalogue of named mechanisms: constructors that assemble parts, and `VARIANTS`, which lists
them.
"""

from typing import TYPE_CHECKING

from regard.nn.variants.compressed import *
from regard.nn.variants.cross import *
from regard.nn.variants.decayed import *
from regard.nn.variants.delta import *
from regard.nn.variants.masked import *
from regard.nn.variants.recurrent import *
from regard.nn.variants.registry import VARIANTS as VARIANTS
from regard.nn.variants.registry import Variant as Variant
from regard.nn.variants.registry import build as build
from regard.nn.variants.scored import *
from regard.nn.variants.selected import *
from regard.nn.variants.small_cache import *
from regard.nn.variants.softmax import *
from regard.nn.variants.steps import *

if not TYPE_CHECKING:  # type checkers read the constructors in the modules above
    __all__ = ["VARIANTS", "Variant", "build", "stacked", *VARIANTS]

    def __dir__() -> list[str]:
        return sorted(__all__)
