"""Counters: bytes on the wire where collectives are issued, bytes of memory by owner, resident memory.

Nothing here runs unless somebody measures, and importing it reads nothing of the machine.
"""
