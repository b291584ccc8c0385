# Network and RDMA device of a guest. Sourced by its start.sh: network.sh NODE NODES
#
# One node: rxe0 on one end of a veth pair. Several: rxe0 on the card that qemu joins with the other guests.
# shellcheck shell=bash
node=$1 nodes=$2
hostname "node$node"
ip link set lo up
if ((nodes > 1)); then
  nic=eth0
else
  nic=veth0
  ip link add veth0 type veth peer name veth1
  ip link set veth1 up
fi
ip addr add "10.77.0.$((node + 1))/24" dev "$nic"
ip link set "$nic" up
ip route add default dev "$nic"
rdma link add rxe0 type rxe netdev "$nic"
ulimit -l unlimited
