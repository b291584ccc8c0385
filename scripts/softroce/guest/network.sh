# Networks and RDMA device of a guest. Sourced by its start.sh: network.sh NODE NODES
#
# The data network (10.78.0.0/24) is where rxe0 and everything under test is: one end of a veth pair, or, with several
# guests, the wire between them. The tests reach the other guests by a wire of their own (10.77.0.0/24), so that they can
# take the data network away.
# shellcheck shell=bash
node=$1 nodes=$2
hostname "node$node"
ip link set lo up
if ((nodes > 1)); then
  ip addr add "10.77.0.$((node + 1))/24" dev eth0
  ip link set eth0 up
  ip link set eth1 name data0
else
  ip link add data0 type veth peer name data1
  ip link set data1 up
fi
ip addr add "10.78.0.$((node + 1))/24" dev data0
ip link set data0 up
ip route add default dev data0
rdma link add rxe0 type rxe netdev data0
ulimit -l unlimited
