"""The HTTP side: routes, limits, authentication, and the answer to every error."""
