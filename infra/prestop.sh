#!/bin/sh
# Runs before a pod is stopped: prestop.sh head|worker SECONDS. Ends as soon as there is nothing left to wait for, at the latest after SECONDS,
# which must lie below the pod's terminationGracePeriodSeconds.
role=$1
deadline=$(($(date +%s) + $2))

case $role in
head)
    # The driver takes SIGTERM for Ctrl-C: it makes tables of what is done, which needs the cluster.
    pkill -TERM -f 'python.* -m jobs[.]'
    busy() { pgrep -f 'python.* -m jobs[.]' >/dev/null; }
    ;;
worker)
    # Nothing new is started here from now on, and what the end of this node costs isn't held against any task.
    ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'its pod is being stopped' --deadline-remaining-seconds "$2"
    busy() { pgrep -f '^ray::' | xargs -r ps -o args= -p | grep -qv '^ray::IDLE'; }
    ;;
*)
    echo "prestop.sh: $role is neither head nor worker" >&2
    exit 2
    ;;
esac

while busy && [ "$(date +%s)" -lt "$deadline" ]; do
    sleep 1
done
