"""Static check of a program's synchronisation, from its jaxpr: what the interpreter cannot see, and before anything runs.

A rank's kernel is followed with its scalars known (its number, the tables in SMEM, loop counters) and its vectors not:
which copies it starts and waits for, and on which semaphores, does not depend on vectors. That gives each rank a list of
events; `check` then plays all lists against each other.

    check(trace(plan))        raises ProtocolError

What is found: a wait that nothing ends, also one that hangs in a circle; bytes that nobody waits for; a remote copy
before the entry barrier; a buffer written while its owner may still read what an earlier exchange left in it; ranks that
disagree about the barrier's number. Experts are taken to be those of number 0: they change addresses only.
"""
