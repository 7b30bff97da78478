"""Rules: how a recurrence writes a token into its state and reads it, as parts of
`regard.nn.recurrent.Recurrent`.
"""

from regard.nn.rules.delta import Decay, Delta
from regard.nn.rules.linear import Features, Gated, Retention

__all__ = ["Decay", "Delta", "Features", "Gated", "Retention"]
