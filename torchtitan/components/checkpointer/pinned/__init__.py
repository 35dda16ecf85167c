"""The mode ``async_with_pinned_mem``: copies beside training, into memory that a process writes from.

training thread      staging thread         executor thread       writer process
---------------      --------------         ---------------       --------------
snapshot.take -----> copies into the arena
forward, backward    (stager.py)
wait for staging <-- done -----------------> writer.save -------> dcp.save from the arena
optimizer.step                              waits for the reply   (writer_main.py), commit
                                            <-------------------- done, or the error
"""
