"""Track the memory that tensors hold in each part of a step, divided into categories such as parameters and activations."""
