"""The model: weights, the one forward pass, and the Ops that compute it on a device."""
