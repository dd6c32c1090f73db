"""An image as an environment module of a site."""
