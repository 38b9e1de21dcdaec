#include "transport.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace device {

namespace {

constexpr int LOOK_EVERY_MS = 100; // Interval of checks for the end of the process.

struct Header {
    int64_t what, arrived_ns, bytes;
};

// A part in progress.
struct Passage {
    Header header;
    char *data;
    size_t bytes, done = 0;

    bool complete() const { return done == sizeof header + bytes; }
    bool begins() const { return done < sizeof header; }
    char *place() { return begins() ? reinterpret_cast<char *>(&header) + done : data + done - sizeof header; }
    size_t rest() const { return (begins() ? 0 : bytes) + sizeof header - done; }
};

[[noreturn]] void give_up(const std::string &what) { throw std::runtime_error("collective: " + what); }

// A Unix socket in the abstract namespace, which leaves no file and cannot be reached from other machines.
socklen_t socket_address(const std::string &name, sockaddr_un &address)
{
    address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

void await(int socket, short what, Ns until)
{
    pollfd waiting{socket, what, 0};
    while (poll(&waiting, 1, LOOK_EVERY_MS) <= 0)
        if (shutting_down() || now() > until)
            give_up("a rank has not come");
}

} // namespace

Transport::Transport(int rank, int size) : rank_(rank), size_(size)
{
    static std::atomic<int> made{0};
    address_ = "torchlens-asyncdev-" + std::to_string(getpid()) + "-" + std::to_string(++made);
    listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address;
    const socklen_t length = socket_address(address_, address);
    if (bind(listening_, reinterpret_cast<sockaddr *>(&address), length) != 0 || listen(listening_, size) != 0)
        give_up("no socket");
}

Transport::~Transport()
{
    close(listening_);
    for (const auto &[peer, socket] : sockets_)
        close(socket);
}

void Transport::connect_to(int rank, const std::string &name, Ns)
{
    const int connected = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address;
    const socklen_t length = socket_address(name, address);
    sockets_[rank] = connected;
    if (connect(connected, reinterpret_cast<sockaddr *>(&address), length) != 0 ||
        send(connected, &rank_, sizeof rank_, MSG_NOSIGNAL) != sizeof rank_)
        give_up("rank " + std::to_string(rank) + " is not there");
    fcntl(connected, F_SETFL, O_NONBLOCK);
}

void Transport::accept_others(Ns timeout_ns)
{
    const Ns until = now() + timeout_ns;
    for (int i = rank_ + 1; i < size_; ++i) {
        await(listening_, POLLIN, until);
        const int accepted = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
        int rank = -1;
        await(accepted, POLLIN, until);
        if (recv(accepted, &rank, sizeof rank, MSG_WAITALL) != sizeof rank)
            give_up("a rank has left");
        sockets_[rank] = accepted;
        fcntl(accepted, F_SETFL, O_NONBLOCK);
    }
    close(listening_);
    listening_ = -1;
}

Ns Transport::exchange(const std::vector<Part> &parts, int64_t what, Ns arrived_ns, Ns timeout_ns)
{
    struct Peer {
        std::deque<Passage> out, in;
    };
    std::map<int, Peer> peers;
    for (const Part &part : parts) {
        auto *from = static_cast<char *>(const_cast<void *>(part.out));
        Peer &peer = peers[part.peer];
        if (part.sends)
            peer.out.push_back({{what, arrived_ns, int64_t(part.out_bytes)}, from, part.out_bytes});
        if (part.receives)
            peer.in.push_back({{}, static_cast<char *>(part.in), part.in_bytes});
    }
    for (auto &[rank, peer] : peers) { // Both sides exchange their times of arrival.
        if (peer.out.empty())
            peer.out.push_back({{what, arrived_ns, 0}, nullptr, 0});
        if (peer.in.empty())
            peer.in.push_back({{}, nullptr, 0});
    }
    Ns last_ns = arrived_ns;
    const Ns until = now() + timeout_ns;
    while (!peers.empty()) {
        std::vector<pollfd> waiting;
        for (const auto &[rank, peer] : peers) {
            const short events = (peer.out.empty() ? 0 : POLLOUT) | (peer.in.empty() ? 0 : POLLIN);
            waiting.push_back({sockets_.at(rank), events, 0});
        }
        poll(waiting.data(), waiting.size(), LOOK_EVERY_MS);
        if (shutting_down())
            give_up("the process ends");
        if (now() > until)
            give_up("rank " + std::to_string(peers.begin()->first) + " has not come in time");
        size_t place = 0;
        for (auto at = peers.begin(); at != peers.end(); ++place) {
            auto &[rank, peer] = *at;
            const auto move = [&, rank = rank](std::deque<Passage> &passages, bool out) {
                while (!passages.empty()) {
                    Passage &first = passages.front();
                    const ssize_t moved = out ? send(waiting[place].fd, first.place(), first.rest(), MSG_NOSIGNAL)
                                              : recv(waiting[place].fd, first.place(), first.rest(), 0);
                    if (moved < 0 && (errno == EAGAIN || errno == EINTR))
                        return;
                    if (moved <= 0)
                        give_up("rank " + std::to_string(rank) + " has left");
                    first.done += moved;
                    if (!out && first.done == sizeof(Header)) {
                        if (first.header.what != what || first.header.bytes != int64_t(first.bytes))
                            give_up("rank " + std::to_string(rank) + " has come to another one");
                        last_ns = std::max(last_ns, first.header.arrived_ns);
                    }
                    if (first.complete())
                        passages.pop_front();
                }
            };
            if (waiting[place].revents & POLLOUT)
                move(peer.out, true);
            if (waiting[place].revents & (POLLIN | POLLHUP | POLLERR))
                move(peer.in, false);
            at = peer.out.empty() && peer.in.empty() ? peers.erase(at) : std::next(at);
        }
    }
    return last_ns;
}

} // namespace device
