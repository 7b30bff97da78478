"""Attention as people write it, right and wrong, written before the audit that judges it: its
independent oracle.
"""
