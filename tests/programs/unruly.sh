# Starts what programs start and forget: children in sessions of their own, deaf to signals.
setsid sh -c 'trap "" TERM; while :; do sleep 0.2; done' &
(setsid nohup sh -c 'trap "" TERM HUP INT; while :; do sleep 0.2; done' >/dev/null 2>&1 &)
sh -c '(sleep 600 &) ; sleep 600' &
echo started > started.txt
trap "" TERM
while :; do sleep 0.2; done
