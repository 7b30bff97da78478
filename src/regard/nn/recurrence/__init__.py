"""Mechanisms whose memory is a state of fixed size: projections, rules, and their module."""
