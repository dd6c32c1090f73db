"""Submit files for researchers: what is offered, what of it is proven, what to write."""
