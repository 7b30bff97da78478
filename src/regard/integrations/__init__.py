"""Other libraries that can use regard's attention: one package for each, imported by whoever wants
it.
"""
