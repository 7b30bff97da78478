"""What families are assembled from, beside the parts of `regard.nn`: what several of them read,
name and build alike.
"""
