#!/bin/bash
# bash examples/mpirun.sh examples/hostfile     # on the first host of the file: Open MPI puts rank 0 where mpirun runs
# Open MPI starts as many ranks on each host of the file as it has slots; multinode.py asks how many there are.
hostfile=${1:?which hostfile, with lines such as "host0 slots=4"?}
options=(
  --hostfile "$hostfile"
  -x PATH                              # on the other hosts, too
  -x MASTER_ADDR="$(head -n 1 "$hostfile" | cut -d ' ' -f 1)"  # where rank 0 is
  -mca odls_base_sigkill_timeout 10    # seconds to save a checkpoint in, when mpirun gets SIGTERM; it takes twice as
                                       # long to return then, and after a failure, too
)
exec mpirun "${options[@]}" python "$(dirname "$0")/multinode.py" "${@:2}"
