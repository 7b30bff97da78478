"""Record what attention computed in a run, read any block of it back, and audit it."""

from regard.inspect.record.record_model import record
from regard.inspect.record.recorder import Recorder, RecordingOptions

__all__ = ["Recorder", "RecordingOptions", "record"]
