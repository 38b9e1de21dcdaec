// Transfer of bytes between ranks on one machine: a socket for each pair of ranks, without torch.
#pragma once

#include "streams.h"

#include <map>
#include <string>
#include <vector>

namespace device {

// Data sent to a peer and received from it in one collective. Both may be empty; the peer is still contacted.
struct Part {
    int peer;
    const void *out;
    size_t out_bytes;
    void *in;
    size_t in_bytes;
    bool sends = true, receives = true; // Only one is true in a point-to-point operation.
};

class Transport {
public:
    Transport(int rank, int size);
    ~Transport();
    Transport(const Transport &) = delete;

    const std::string &address() const { return address_; }
    void connect_to(int rank, const std::string &address, Ns timeout_ns);
    void accept_others(Ns timeout_ns); // Accepts connections of all higher ranks.

    // Exchanges all parts; parts with the same peer keep their order. what: must be equal on both sides. Returns the
    // time at which the last participant arrived, on CLOCK_MONOTONIC, which all processes share. Throws.
    Ns exchange(const std::vector<Part> &parts, int64_t what, Ns arrived_ns, Ns timeout_ns);

private:
    int rank_, size_, listening_;
    std::string address_;
    std::map<int, int> sockets_;
};

} // namespace device
