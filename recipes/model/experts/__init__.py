"""Experts in the place of a feed-forward network: their shape, the router, the products, their ways over ranks."""
