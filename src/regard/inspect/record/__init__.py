"""Record what attention computed in a run, read it back in parts, and check it."""

from regard.inspect.record.record_model import record
from regard.inspect.record.recorder import Recorder, RecordingOptions

__all__ = ["Recorder", "RecordingOptions", "record"]
