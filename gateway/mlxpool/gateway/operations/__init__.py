"""What operators need of the gateway: the record of each request, its metrics, its drain.

None of it knows routes or the pool.
"""
