"""Mixture of experts: the section of the configuration, the router, grouped matmuls, and experts on several ranks."""
