"""Building blocks that several model families share: attention, rotary modules, initial weights."""
