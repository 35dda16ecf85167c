"""Saves beside training: copies into shared memory, and a process of the rank that writes from it.

training thread      staging thread         executor thread       writer process
---------------      --------------         ---------------       --------------
snapshot.take -----> copies into the arena
forward, backward    (stager.py)
wait for staging <-- done -----------------> Staged.deliver ----> its program saves from the arena
optimizer.step                              waits for the reply   (serving.py), commit
                                            <-------------------- done, or the error

Two managers save like this, each with a program of its own: that for torch.distributed.checkpoint is
writer_main.py here, with dcp_shards.py and torch_seam.py; the other one is in ``tc/``.
"""
