"""Mixture of experts: the router, the experts as grouped matmuls, and experts spread over several ranks."""
