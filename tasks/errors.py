"""The two kinds of failure of a stage; retries look at the class and nothing else."""


class Transient(Exception):
    """A retry of the same request may succeed: a child died, a connection broke, a put was lost."""


class Permanent(Exception):
    """A retry of the same request fails the same way: bad input, corrupt object, NaN."""
