"""Every point at which a crash can fall: recorded, built from the record, started from again.

operations.py  what was done to a disk, as values, and the log of it
tree.py        what a folder holds, as values
model.py       a disk, and what is durable of it; what is assumed of disks
points.py      the states that crashes leave of a history
interleaving.py  the orders in which ranks can have done what each of them did
"""
