// Bytes between the ranks of a group, on one machine: a socket for each pair of ranks, and nothing of torch.
#pragma once

#include "streams.h"

#include <map>
#include <string>
#include <vector>

namespace device {

// What goes to a peer and comes from it, in one collective. Either may be of no bytes; the peer is told all the same.
struct Part {
    int peer;
    const void *out;
    size_t out_bytes;
    void *in;
    size_t in_bytes;
    bool sends = true, receives = true; // a point-to-point operation does one of both
};

class Transport {
public:
    Transport(int rank, int size);
    ~Transport();
    Transport(const Transport &) = delete;

    const std::string &address() const { return address_; }
    void connect_to(int rank, const std::string &address, Ns timeout_ns);
    void accept_others(Ns timeout_ns); // all those of higher ranks

    // Exchanges all parts, those with one peer in their order. what: must be the same on both sides. Returns when the
    // last of those who take part has arrived, on CLOCK_MONOTONIC, which is all processes' own. Throws.
    Ns exchange(const std::vector<Part> &parts, int64_t what, Ns arrived_ns, Ns timeout_ns);

private:
    int rank_, size_, listening_;
    std::string address_;
    std::map<int, int> sockets_;
};

} // namespace device
