"""Adapters that let other libraries use regard's attention: one package for each library."""
