"""One of two ranks on machines of their own, which waits for the other.

Arguments: rank, seconds of silence, URL of rank 0. Its lines are `waits`, and the error that ends
the wait.
"""

import sys
from datetime import timedelta

import torch.distributed as dist

from lrl.distributed.keepalive import close_silent_connections
from lrl.distributed.ranks import Ranks
from lrl.errors import RankLostError


def main(rank: int, silence_s: float, url: str) -> None:
    wait = timedelta(minutes=30)
    dist.init_process_group("gloo", url, wait, world_size=2, rank=rank)
    ranks = Ranks(dist.new_group(backend="gloo", timeout=wait))
    if silence_s:
        close_silent_connections(silence_s)
    print("waits", flush=True)
    try:
        ranks.gather(None) if rank == 0 else ranks.receive()
    except RankLostError as error:
        print(f"{error} ({error.__cause__})", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
