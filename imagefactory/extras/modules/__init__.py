"""Write an image as an environment module of a site."""
